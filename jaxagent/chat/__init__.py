"""Messages to tokens and back. The checkpoint's own template renders; one small file per family says what it leaves open."""
