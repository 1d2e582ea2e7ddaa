"""What a request and its answer look like on the wire of OpenAI, and what a call goes through."""
