"""Pure decisions: no socket, thread, file or clock. Events in, effects out; numbers in, numbers out."""
