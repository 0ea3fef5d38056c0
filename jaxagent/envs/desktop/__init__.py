"""What stands behind the worlds `osworld` and `desk`: guests, what their screens say, what can be done there, how it is scored."""
