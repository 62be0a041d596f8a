"""The discussion forum: forums, posts, comments, votes, profiles.

The reader is marlow_q, signed in.
"""

from websites.site import (
    Site, button, choose, esc, field, form, link, links, pager, top_bar, words,
)

ME = "marlow_q"
WORDS = words("forum")
NAMES = [
    first + second
    for first in "quiet amber north copper little stone paper river".split()
    for second in "_fox _owl _kite _moss _lark _pine _otter".split()
]
SCHEMA = """
create table forum(name text primary key, about text);
create table post(id integer primary key, forum text, title text, author text, body text,
  date text, votes int);
create table comment(id integer primary key, post int, author text, body text, votes int);
create table vote(post int primary key, way int);
create table member(name text primary key, bio text, joined text);
create table follows(forum text primary key)
"""
PAGE_SIZE = 10  # posts on a page
FIRST_ID = 101  # ids of three digits: no address of a post is the beginning of another's
POSTS_PER_FORUM = 12
NUM_POSTS = POSTS_PER_FORUM * len(WORDS.topics)


# ---- the content of the tables; the order of the random draws must not change ----


def fill(db, rng):
    people = rng.sample(NAMES, 24)
    for name in (ME, *people):
        biography = rng.choice(WORDS.biographies)
        joined = f"{rng.randint(2015, 2023)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        db.execute("insert into member values(?,?,?)", (name, biography, joined))

    all_days = [f"2025-{month:02}-{day:02}" for month in range(1, 13) for day in range(1, 29)]
    days = sorted(rng.sample(all_days, NUM_POSTS))
    votes = rng.sample(range(3, 900), NUM_POSTS)  # all different: sorting has one result
    posts = []  # (forum, title)
    for forum in rng.sample(list(WORDS.topics), len(WORDS.topics)):
        about, things = WORDS.topics[forum]
        db.execute("insert into forum values(?,?)", (forum, about))
        pairs = [(title, thing) for title in WORDS.titles for thing in things.split()]
        for title, thing in rng.sample(pairs, POSTS_PER_FORUM):
            posts.append((forum, title.format(thing.replace("-", " "))))
    rng.shuffle(posts)

    for index, (forum, title) in enumerate(posts):
        post_id = FIRST_ID + index
        author = rng.choice(people)
        text = rng.choice(WORDS.texts)
        db.execute(
            "insert into post values(?,?,?,?,?,?,?)",
            (post_id, forum, title, author, text, days[index], votes[index]))
        writers = rng.sample(people, rng.choice([0, 1, 2, 3, 4, 5, 7]))
        comment_votes = rng.sample(range(1, 90), len(writers))
        for writer, count in zip(writers, comment_votes):
            db.execute(
                "insert into comment(post,author,body,votes) values(?,?,?,?)",
                (post_id, writer, rng.choice(WORDS.comments), count))


# ---- pieces of pages ----


def frame(request, title, body):
    menu = link("/forums", "Forums"), link("/submit", "New post"), link("/user/" + ME, ME)
    return top_bar(request, "Commonplace", "Search posts", *menu) + f"<main>{body}</main>"


SITE = Site("forum", "Commonplace", SCHEMA, fill, frame)

# SQL expression: the number of comments on a post.
COUNT = "(select count(*) from comment where post=post.id)"
SORTS = {"new": "id desc", "top": "votes desc", "comments": f"{COUNT} desc, id desc"}


def entries(request, where, *values):
    """The list of the posts that meet the SQL condition `where`: the request's page of them."""
    order = SORTS.get(request.query.get("sort", ""), SORTS["new"])
    posts = request.page_of(
        f"select id,forum,title,author,date,votes,{COUNT},"
        f"(select way from vote where post=post.id) from post where {where} order by {order}",
        PAGE_SIZE, *values)
    html = ""
    for post_id, forum, title, author, date, votes, num_comments, own_vote in posts:
        html += (
            f'<div class="box post"><div class="votes"><b>{votes + (own_vote or 0)}</b><br>'
            '<span class="muted">votes</span></div>'
            f'<div>{link(f"/f/{forum}/{post_id}", title)}<p class="muted">'
            f'by {link("/user/" + author, author)} in {link("/f/" + forum, forum)} on {date}, '
            f'{num_comments} comments</p></div></div>'
        )
    return html


def sort_links(request):
    sorts = {"Newest": "new", "Top": "top", "Most commented": "comments"}
    return f'<p class="pager">{links(request.path, "sort", sorts)}</p>'


def count_posts(request, where, *values):
    return request.value(f"select count(*) from post where {where}", *values)


# ---- lists ----


@SITE.get("/")
def front(request):
    return "Commonplace", (
        f"<h1>All forums</h1>{sort_links(request)}{entries(request, '1')}"
        f"{pager(request, count_posts(request, '1'), PAGE_SIZE)}"
    )


@SITE.get("/forums")
def forums(request):
    found = request.rows(
        "select name,about,(select count(*) from post where forum=name) from forum order by name")
    boxes = "".join(
        f'<div class="box">{link("/f/" + name, name)} <span class="muted">{count} posts</span>'
        f'<p>{esc(about)}</p></div>'
        for name, about, count in found)
    return "Forums", f'<h1>Forums</h1>{boxes}<p>{link("/forums/new", "Create a forum")}</p>'


@SITE.get("/search")
def search(request):
    words = request.query.get("q", "").split()[:8]
    where = " and ".join(["instr(lower(title), lower(?))"] * len(words)) or "0"
    count = count_posts(request, where, *words)
    return "Search", (
        f"<h1>{count} posts about '{esc(' '.join(words))}'</h1>"
        f"{entries(request, where, *words)}{pager(request, count, PAGE_SIZE)}"
    )


# ---- forums ----


@SITE.get("/forums/new")
def forum_form(request):
    return "Create a forum", "<h1>Create a forum</h1>" + form(
        "/forums/new", "Create forum", field("name", "Name"), field("about", "Description"))


@SITE.post("/forums/new")
def forum_new(request):
    text = request.text("name", 30).lower().replace(" ", "_")
    name = "".join(c for c in text if c.isascii() and (c.isalnum() or c == "_"))
    if not name:
        return "/forums/new"
    request.change("insert or ignore into forum values(?,?)", name, request.text("about", 200))
    return "/f/" + name


@SITE.get(r"/f/(\w+)")
def forum(request, name):
    about = request.value("select about from forum where name=?", name)
    subscribed = bool(request.rows("select 1 from follows where forum=?", name))
    text = "You are subscribed." if subscribed else "You are not subscribed."
    follow_text = "Unsubscribe" if subscribed else "Subscribe"
    follow_button = button(f"/f/{name}/follow", follow_text, kind="plain")
    side = (
        f'<div class="box" id="about"><h2>{esc(name)}</h2><p>{esc(about)}</p>'
        f'<p class="muted">{text}</p>{follow_button}'
        f'<p>{link("/submit", "Write a post here", forum=name)}</p></div>'
    )
    count = count_posts(request, "forum=?", name)
    return name, (
        f'<h1>{esc(name)}</h1>{sort_links(request)}<div class="cols">'
        f'<div>{entries(request, "forum=?", name)}{pager(request, count, PAGE_SIZE)}</div>'
        f"<div>{side}</div></div>"
    )


@SITE.post(r"/f/(\w+)/follow")
def follow(request, name):
    request.value("select 1 from forum where name=?", name)
    if not request.change("delete from follows where forum=?", name):
        request.change("insert into follows values(?)", name)
    return "/f/" + name


# ---- posts ----


@SITE.get(r"/f/(\w+)/(\d{1,9})")
def post(request, forum, number):
    post_id, title, author, body, date, votes, own_vote = request.row(
        "select id,title,author,body,date,votes,(select way from vote where post=post.id) "
        "from post where id=? and forum=?",
        int(number), forum)
    path = f"/f/{forum}/{post_id}"
    up_kind = "" if own_vote == 1 else "plain"
    down_kind = "" if own_vote == -1 else "plain"
    vote_buttons = (
        button(f"{path}/vote", "▲", "Upvote", up_kind, way=1)
        + button(f"{path}/vote", "▼", "Downvote", down_kind, way=-1)
    )
    delete_button = ""
    if author == ME:
        delete_button = button(f"{path}/delete", "Delete post", kind="danger")

    comments = request.rows(
        "select author,body,votes from comment where post=? order by id", post_id)
    comment_boxes = "".join(
        f'<div class="box comment"><p class="muted">{link("/user/" + writer, writer)}, '
        f'{count} votes</p><p>{esc(text)}</p></div>'
        for writer, text, count in comments)
    return title, (
        f'<p class="muted">{link("/f/" + forum, forum)}</p>'
        f'<div class="box" id="post"><h1>{esc(title)}</h1>'
        f'<p class="muted">by {link("/user/" + author, author)} on {date}, '
        f'<b class="score">{votes + (own_vote or 0)} votes</b>{" (you voted)" if own_vote else ""}'
        f'</p><p>{esc(body)}</p>{vote_buttons}{delete_button}</div>'
        f'<h2>{len(comments)} comments</h2>{comment_boxes}'
        + form(f"{path}/comment", "Post comment", field("body", "Your comment", kind="area"))
    )


@SITE.post(r"/f/(\w+)/(\d{1,9})/vote")
def vote(request, forum, number):
    post_id = request.value("select id from post where id=? and forum=?", int(number), forum)
    way = 1 if request.text("way") == "1" else -1
    # A second vote of the same kind takes the first one back.
    if not request.change("delete from vote where post=? and way=?", post_id, way):
        request.change("insert or replace into vote values(?,?)", post_id, way)
    return f"/f/{forum}/{post_id}"


@SITE.post(r"/f/(\w+)/(\d{1,9})/comment")
def comment(request, forum, number):
    post_id = request.value("select id from post where id=? and forum=?", int(number), forum)
    text = request.text("body")
    if text:
        request.change(
            "insert into comment(post,author,body,votes) values(?,?,?,1)", post_id, ME, text)
    return f"/f/{forum}/{post_id}"


@SITE.post(r"/f/(\w+)/(\d{1,9})/delete")
def delete(request, forum, number):
    request.change("delete from post where id=? and author=?", int(number), ME)
    return "/f/" + forum


@SITE.get("/submit")
def submit_form(request):
    names = [name for (name,) in request.rows("select name from forum order by name")]
    selected = request.query.get("forum", "")
    return "New post", "<h1>New post</h1>" + form(
        "/submit", "Publish", choose("forum", "Forum", names, selected), field("title", "Title"),
        field("body", "Text", kind="area"))


@SITE.post("/submit")
def submit(request):
    forum = request.value("select name from forum where name=?", request.text("forum"))
    title = request.text("title", 200)
    if not title:
        return "/submit"
    post_id = request.db.execute(
        "insert into post(forum,title,author,body,date,votes) values(?,?,?,?,'2026-01-05',1)",
        (forum, title, ME, request.text("body")),
    ).lastrowid
    return f"/f/{forum}/{post_id}"


# ---- members ----


@SITE.get(r"/user/(\w+)")
def user(request, name):
    bio, joined = request.row("select bio,joined from member where name=?", name)
    num_posts = count_posts(request, "author=?", name)
    num_comments = request.value("select count(*) from comment where author=?", name)
    edit = f'<p>{link("/profile", "Edit profile")}</p>' if name == ME else ""
    return name, (
        f'<div class="box" id="profile"><h1>{esc(name)}</h1><p class="bio">{esc(bio)}</p>'
        f'<p class="muted">Member since {joined}, {num_posts} posts, {num_comments} comments</p>'
        f'{edit}</div>{entries(request, "author=?", name)}{pager(request, num_posts, PAGE_SIZE)}'
    )


@SITE.get("/profile")
def profile_form(request):
    bio = request.value("select bio from member where name=?", ME)
    return "Edit profile", "<h1>Edit profile</h1>" + form(
        "/profile", "Save profile", field("bio", "Biography", bio, "area"))


@SITE.post("/profile")
def profile(request):
    request.change("update member set bio=? where name=?", request.text("bio", 500), ME)
    return "/user/" + ME
