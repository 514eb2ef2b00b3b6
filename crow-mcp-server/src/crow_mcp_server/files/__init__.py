"""The file editor: it views and edits text files below the roots of a workspace."""
