"""The forecast of a step in time: its turns and waits, what ranks hold, and the files that show it."""
