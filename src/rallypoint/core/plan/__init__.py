"""What a step costs on a given cluster, what is known of its machines and links, and settings that follow from both."""
