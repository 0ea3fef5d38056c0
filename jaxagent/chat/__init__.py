"""Messages to tokens and back. One file per family holds its template and its tool-call parser together."""
