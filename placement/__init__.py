"""Choose the plan that meets an intent, and its devices. Pure: no Ray, torch, vLLM, HTTP or clock."""
