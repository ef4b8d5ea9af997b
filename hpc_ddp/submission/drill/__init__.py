"""The drill: does a script resume right?"""
