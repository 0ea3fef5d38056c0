"""What stands behind the worlds `retail` and `webshop`: stores in SQLite, tools, customers, catalogues, scores."""
