"""What a model is and what a plan for it would cost. Pure: no Ray, torch, vLLM, HTTP or clock."""
