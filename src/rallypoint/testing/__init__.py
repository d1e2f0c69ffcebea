"""Public test tools: plain-PyTorch references, clusters of real processes, contract suites, network namespaces."""
