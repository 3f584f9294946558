"""What tests of kernels share."""
