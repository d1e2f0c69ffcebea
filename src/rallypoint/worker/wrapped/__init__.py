"""A loop of the script's own (`rp.wrap`): its gradients are pushed, and its model gets the new version."""
