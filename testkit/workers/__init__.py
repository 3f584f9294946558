"""What tests of workers share."""
