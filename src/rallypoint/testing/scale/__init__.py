"""Large clusters without their machines: the real coordinator's decisions, and a fluid model of what members do."""
