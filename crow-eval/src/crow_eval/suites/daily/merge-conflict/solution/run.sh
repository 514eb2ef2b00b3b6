git add greet.py
git commit -q -m "Merge branch 'languages'"
