"""The parts of a prediction: what is asked and answered, checks, times, intervals, memory. Pure."""
