"""Chats: reading messages, rendering them with a template, and marking the tokens to train on."""
