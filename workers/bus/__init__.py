"""Messages between the scheduler, its client in the worker, and the ranks."""
