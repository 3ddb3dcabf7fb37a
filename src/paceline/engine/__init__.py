"""The engine as a process: its loop, the frames it speaks, and the client that the server talks through."""
