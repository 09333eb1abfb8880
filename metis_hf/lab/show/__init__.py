"""Show results: tables, figures, pages and progress."""
