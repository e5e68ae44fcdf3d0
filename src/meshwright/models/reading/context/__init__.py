"""What context parallel must know of a model: how its attentions are called, and how the heads of its mixers divide."""
