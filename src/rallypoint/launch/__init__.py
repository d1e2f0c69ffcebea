"""Starting the members of a job: inside one process, or as processes on this machine."""
