"""Public test tools: a plain-PyTorch reference, real process clusters, contract suites, hosts in network namespaces."""
