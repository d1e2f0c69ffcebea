"""Kubernetes: a job as manifests, of one template. Nothing here talks to a cluster: `kubectl apply` does."""
