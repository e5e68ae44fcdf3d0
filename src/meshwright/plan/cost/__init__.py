"""What a plan costs: bytes, collectives, operations, and the devices and links that they run on."""
