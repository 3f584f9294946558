"""Changes to uvicorn, which Serve uses."""
