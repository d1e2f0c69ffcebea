"""What comes in over a server's connections: frames are checked here before anybody owns them."""
