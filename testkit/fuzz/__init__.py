"""What tests of fuzz share."""
