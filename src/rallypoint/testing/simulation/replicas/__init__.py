"""What the replicas of a simulated worker keep from round to round under local steps: names in place of tensors."""
