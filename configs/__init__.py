"""Recipes, which come with the package; `mmrl recipes` lists them."""
