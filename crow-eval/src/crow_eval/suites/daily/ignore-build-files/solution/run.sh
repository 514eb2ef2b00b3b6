printf '/build/\n*.tmp\n' > .gitignore
