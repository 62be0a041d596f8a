"""The forum's templates of tasks.

Their order, and the order of the random draws, must not change.
"""

from websites.forum import COUNT, ME
from websites.templates import (
    SiteTemplates, at, click, exactly, impossible, pick, says, shows, write,
)

FORUM = "__REDDIT__"
TASKS = SiteTemplates("forum")


def any_post(db, where="1"):
    """A random post -> (id, forum, title, author, votes, number of comments)."""
    return db.any(f"select id,forum,title,author,votes,{COUNT} from post where {where} order by id")


def any_forum(db):
    """The name of a random forum."""
    return db.any("select name from forum order by name")[0]


def search_post(title):
    """The step that leads to the results of a search for a post."""
    return write("Search posts", title, 1, "searchbox")


def find_post(title):
    """The steps that lead to a post."""
    return [search_post(title), click("link", title)]


def find_forum(name):
    """The steps that lead to a forum."""
    return [click("link", "Forums"), click("link", name)]


# ---- navigate ----


@TASKS.add("navigate", "Go to the forum {forum}.")
def open_forum(db, rng):
    name = any_forum(db)
    return {"forum": name}, at(f"{FORUM}/f/{name}"), find_forum(name)


@TASKS.add("navigate", "Show me the posts of the forum {forum}, those with the most votes first.")
def top_posts(db, rng):
    name = any_forum(db)
    check = at(f"{FORUM}/f/{name}?sort=top")
    return {"forum": name}, check, [*find_forum(name), click("link", "Top")]


@TASKS.add("navigate", "Open the post \"{title}\".")
def open_post(db, rng):
    post_id, forum, title, *_ = any_post(db)
    return {"title": title}, at(f"{FORUM}/f/{forum}/{post_id}"), find_post(title)


@TASKS.add("navigate", "Open {page}.")
def open_page(db, rng):
    page, path, name = rng.choice([
        ("the list of all forums", "/forums", "Forums"),
        ("my profile", "/user/" + ME, ME),
        ("the form for a new post", "/submit", "New post"),
    ])
    return {"page": page}, at(FORUM + path), [click("link", name)]


@TASKS.add("navigate", "Show me the profile of the author of the post \"{title}\".")
def open_author(db, rng):
    _, _, title, author, *_ = any_post(db)
    plan = [*find_post(title), click("link", author)]
    return {"title": title}, at(f"{FORUM}/user/{author}"), plan


# ---- find ----


@TASKS.add("find", "How many comments does the post \"{title}\" have? Answer with the number.")
def comments(db, rng):
    _, _, title, _, _, count = any_post(db)
    return {"title": title}, exactly(count), find_post(title), count


@TASKS.add("find", "Who wrote the post \"{title}\"?")
def author(db, rng):
    _, _, title, name, *_ = any_post(db)
    return {"title": title}, says(name), [search_post(title)], name


@TASKS.add("find", "What is the title of the post with the most votes in the forum {forum}?")
def best(db, rng):
    name = any_forum(db)
    title = db.value("select title from post where forum=? order by votes desc", name)
    return {"forum": name}, says(title), [*find_forum(name), click("link", "Top")], title


@TASKS.add("find", "Whose comment on the post \"{title}\" has the most votes?")
def best_comment(db, rng):
    post_id, _, title, *_ = any_post(db, f"{COUNT}>1")
    name = db.value("select author from comment where post=? order by votes desc", post_id)
    return {"title": title}, says(name), find_post(title), name


@TASKS.add("find", "Since when has {member} been a member? Answer in the form 2020-12-31.")
def since(db, rng):
    name, joined = db.any(
        "select name,joined from member where name in (select author from post) order by name")
    title = db.value("select title from post where author=? order by id desc", name)
    return {"member": name}, says(joined), [*find_post(title), click("link", name)], joined


# ---- change ----


@TASKS.add("change", "Vote for the post \"{title}\".")
def upvote(db, rng):
    post_id, forum, title, _, votes, _ = any_post(db)
    facts = [f"{votes + 1} votes", "you voted"]
    check = shows((f"{FORUM}/f/{forum}/{post_id}", "#post", facts))
    return {"title": title}, check, [*find_post(title), click("button", "Upvote")]


@TASKS.add("change", "Comment \"{text}\" on the post \"{title}\".")
def add_comment(db, rng):
    post_id, forum, title, *_ = any_post(db)
    text = rng.choice([
        "Well said", "I see it differently", "Thanks for this", "Could you say more",
    ])
    text += rng.choice([".", "!", " - really."])
    check = shows((f"{FORUM}/f/{forum}/{post_id}", ".comment:last-of-type", [ME, text]))
    plan = [*find_post(title), write("Your comment", text), click("button", "Post comment")]
    return {"title": title, "text": text}, check, plan


@TASKS.add("change", "Publish a post titled \"{title}\" in the forum {forum}.")
def publish(db, rng):
    forum = any_forum(db)
    post_id = db.value("select max(id) from post") + 1
    title = rng.choice(["Looking for", "Wanted:", "Who has"])
    title += rng.choice([" a mentor", " old magazines", " company on Sundays", " a second opinion"])
    check = shows((f"{FORUM}/f/{forum}/{post_id}", "#post", [title, f"by {ME}"]))
    plan = [
        click("link", "New post"), pick(forum), write("Title", title), click("button", "Publish"),
    ]
    return {"title": title, "forum": forum}, check, plan


@TASKS.add("change", "Change my biography to \"{text}\".")
def biography(db, rng):
    one = rng.choice(["long walks", "slow trains", "old maps"])
    other = rng.choice(["short books", "quiet rooms", "warm bread"])
    text = f"I like {one} and {other}"
    check = shows((f"{FORUM}/user/{ME}", ".bio", [text]))
    plan = [
        click("link", ME), click("link", "Edit profile"), write("Biography", text),
        click("button", "Save profile"),
    ]
    return {"text": text}, check, plan


@TASKS.add("change", "Subscribe to the forum {forum}.")
def subscribe(db, rng):
    name = any_forum(db)
    check = shows((f"{FORUM}/f/{name}", "#about", ["You are subscribed"]))
    return {"forum": name}, check, [*find_forum(name), click("button", "Subscribe")]


@TASKS.add("change", "Create a forum called {forum}, described as \"{about}\".")
def create_forum(db, rng):
    first = rng.choice("urban winter silent early".split())
    second = rng.choice("sketching baking sailing beekeeping".split())
    name = f"{first}_{second}"
    about = rng.choice(["For beginners", "Everyone is welcome"])
    check = shows((f"{FORUM}/f/{name}", "#about", [name, about]))
    plan = [
        click("link", "Forums"), click("link", "Create a forum"), write("Name", name),
        write("Description", about), click("button", "Create forum"),
    ]
    return {"forum": name, "about": about}, check, plan


# ---- impossible ----


@TASKS.add("impossible", "What is the e-mail address of {member}?")
def address(db, rng):
    name = db.any("select distinct author from post order by author")[0]
    title = db.value("select title from post where author=? order by id desc", name)
    check = impossible("The forum does not show addresses.")
    return {"member": name}, check, [*find_post(title), click("link", name)], "N/A"


@TASKS.add("impossible", "How many posts are there in the forum {forum}?")
def no_forum(db, rng):
    name = rng.choice("chess photography sewing fishing pottery".split())
    check = impossible("There is no such forum.")
    return {"forum": name}, check, [click("link", "Forums")], "N/A"
