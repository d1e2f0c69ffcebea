"""Public test tools: a plain-PyTorch reference, clusters of real processes, contract suites, hosts in network
namespaces."""
