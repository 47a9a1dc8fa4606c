"use strict";
// Conversations, kept in this browser alone: [{id, title, messages: [{role, content, ...}]}]. Each tab
// keeps the id of its own, which is open again when the page is loaded anew.

const MOST = 100;

const history_ = {
  all: JSON.parse(localStorage.getItem("anybit.conversations") || "[]"),
  now: null,

  // Starts a conversation, which is kept from its first message on.
  begin() {
    return this.enter({ id: Date.now(), title: "", messages: [] });
  },

  open(id) {
    const found = this.all.find(one => one.id === id);
    return found ? this.enter(found) : this.begin();
  },

  reopen() {
    return this.open(Number(sessionStorage.getItem("anybit.now")));
  },

  enter(one) {
    this.now = one;
    sessionStorage.setItem("anybit.now", one.id);
    return one;
  },

  save() {
    const one = this.now;
    if (!one.messages.length) return;
    one.title = one.messages[0].content.trim().split("\n")[0].slice(0, 60) || "Untitled";
    this.all = [one, ...this.all.filter(other => other.id !== one.id)].slice(0, MOST);
    this.write();
  },

  remove(id) {
    this.all = this.all.filter(one => one.id !== id);
    this.write();
  },

  // The oldest conversations make room when the browser's storage is full.
  write() {
    for (;;) {
      try {
        localStorage.setItem("anybit.conversations", JSON.stringify(this.all));
        return;
      } catch (error) {
        if (!this.all.length) return;
        this.all.pop();
      }
    }
  },
};
