"""What tests of cluster share."""
