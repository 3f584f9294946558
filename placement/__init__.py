"""Which plan meets an intent, and which devices carry it. Pure: no Ray, torch, vLLM, HTTP or clock."""
