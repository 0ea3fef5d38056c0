"""What stands behind the worlds `osworld` and `desk`: guests, their screens, what can be done there, its score."""
