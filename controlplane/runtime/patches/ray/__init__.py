"""Changes to Ray 2.60, in the processes of Serve that run our code."""
