"""The configuration as a schema: sections, messages, and the page that is made from it."""
