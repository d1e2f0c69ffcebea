"""The coordinator: decides who is here. It publishes views and is not on the path of a step (I7)."""
