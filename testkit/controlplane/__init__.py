"""What tests of controlplane share."""
