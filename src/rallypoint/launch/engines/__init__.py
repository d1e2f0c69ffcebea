"""Where processes run: this machine, or machines that an engine has."""
