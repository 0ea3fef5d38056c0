"""One file per service: how its protocol carries the operations of the one session model."""
