"""Collections of tools that a world may give to a policy, each a file; `box` lists them and puts them together."""
