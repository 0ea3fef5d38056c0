"""What stands behind the world `android_world`: servers that hold a phone, what is done there, and a small phone of ours."""
