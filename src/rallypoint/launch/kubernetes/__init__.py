"""Kubernetes: a job as manifests, made of typed objects. Nothing here talks to a cluster: `kubectl apply` does."""
