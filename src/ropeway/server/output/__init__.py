"""From a model's text to the parts of a message: thought, content, tool calls. No HTTP, no tokens but their counts."""
