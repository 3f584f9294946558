"""The parts of a prediction: its input and output, checks, times, intervals, memory. Pure."""
