"""Inside one worker: the ranks of a group, what each holds of the model, and how it moves between them."""
