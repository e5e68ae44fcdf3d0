"""What a plan with context parallel alone has an action for."""
