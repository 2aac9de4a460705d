"""Execute a plan: own its folder, run torchrun under supervision, and end it whatever happens."""
