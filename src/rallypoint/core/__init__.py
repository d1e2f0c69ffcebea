"""Pure decisions: no socket, thread, file or clock. Machines take events and return effects."""
