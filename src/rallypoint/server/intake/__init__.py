"""Receives frames on a server's connections and checks them before the owner thread gets them."""
